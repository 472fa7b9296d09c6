// Lets the keyboard scroll what is too wide, and says on which sides more of it is.
{
  const sides = ({ currentTarget: box }) => {
    const rest = box.scrollWidth - box.clientWidth - Math.abs(box.scrollLeft);
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", rest > 1);
  };

  const reach = () => {
    for (const box of document.querySelectorAll("article pre, .table-wrapper, p:has(> img)")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
      box.addEventListener("scroll", sides, { passive: true });
      sides({ currentTarget: box });
    }
  };
  addEventListener("resize", reach);
  addEventListener("load", reach); // when the pictures are there
  reach();
}
